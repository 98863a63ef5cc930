"""What a role shows over HTTP: health, metrics, state."""
