"""The Announcers: the objects in which gateways and nodes show what they announce, written by the
roles (`report`) and read by the controller (`watch`)."""
