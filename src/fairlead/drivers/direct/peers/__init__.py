"""Other gateways: each tells the others which tables and flows it has.

peers      connections to the other gateways, and what is taken over from them
entry      the listening socket: which connections are accepted
tls        mutual TLS between gateways
refusals   log lines about refused connections
followers  one connected gateway, and the stream that it gets
exchange   which content of the maps is sent, and how content that arrives is merged
messages   the messages as bytes
recent     flows that were sent lately
"""
