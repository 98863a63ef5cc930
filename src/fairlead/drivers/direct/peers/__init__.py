"""Other gateways: the exchange of tables and flow entries between gateways.

peers      connections to the other gateways, and the state that is inherited from them
server     the listening socket: which connections are accepted
tls        mutual TLS between gateways
refusals   log lines about refused connections
followers  one connected gateway, and the stream that it receives
exchange   which content of the maps is sent, and how received content is merged
messages   the messages, as values and as bytes
recent     flows whose entries changed recently
"""
