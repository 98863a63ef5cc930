"""The driver of load balancers in the northbound database of OVN.

`spec` has the values, `slots` the distribution over backends, `render` the columns of each row,
`diff` the steps, `changes` the steps as ovn-nbctl commands, and `marks` how rows are recognized."""
