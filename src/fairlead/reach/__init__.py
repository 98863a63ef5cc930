"""How callers outside of a cluster reach its load balancers: `fairlead probe`."""
