"""The three processes of Fairlead. Each is wiring: which plan and which drivers the one loop
runs."""
