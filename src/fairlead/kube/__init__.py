"""All that speaks Kubernetes: objects, client, reflector, status and Events."""
