"""The watch over other gateways that announce addresses, by a process of its own.

It is no part of `drivers/announce`, so that the process loads only what it needs.

- `watch`: the gateway's side. `protocol`: the messages.
- `watcher`: asks and listens, in the process (`roles/neighbor_process`).
- `questions`: whether a station answers."""
