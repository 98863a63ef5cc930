"""Real connections that say what came back: answered or not, how fast, which client address the
server saw."""
