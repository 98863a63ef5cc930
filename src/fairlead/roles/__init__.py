"""The three roles: controller, gateway and node. Each is a list of components (`components`), among
them the drivers and the loop that runs the role's part of the plan."""
