"""Test traffic: real connections that record whether they were answered, how fast, and which client
address the server saw."""
