"""The driver that announces load-balancer addresses on layer 2.

responder     answers ARP requests for owned addresses, by a program in the kernel
maps          the pinned maps of the program
gratuitous    announces owned addresses by gratuitous ARP
schedule      when each address is announced
"""
