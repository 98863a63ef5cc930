"""Pure decisions: who may get traffic, which address a Service holds, what a balancer and what a
node must do."""
