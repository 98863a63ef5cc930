"""The wires: kernel and network interfaces, ignorant of Kubernetes and of Fairlead. Each module can
be read alone."""
