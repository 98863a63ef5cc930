"""The three processes of Fairlead. Each is wiring: a list of components (`components`), among which
are the drivers and the loop that runs the role's part of the plan."""
