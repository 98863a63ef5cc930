"""The driver of class `fairlead.io/octavia`: load balancers of OpenStack, by Octavia's API; with
floating IPs and a security group, by Neutron's.

`driver` has the four methods of `fairlead.drivers.Driver`:

* `render` makes a BalancerSpec of a LoadBalancer (`render`, `balancers`, `marks`).
* `read` finds BalancerStates (`read`, `answers`), locates load balancers that a Service shares or
  adopts (`locate`), and adds what is at Neutron (`network`, `neutron`, `security_group`).
* `diff` finds the writes that are missing, each of them a value that prints as a request
  (`diff`, `parts`, `members`, `floating`, `security`, `bodies`, `changes`). Pure. Where no write
  helps now (Octavia is at work, a port is taken, attempts have failed), it says so by a `Blocked`,
  which carries an Outcome (`blocked`).
* `apply` makes the writes, each after Octavia is done with the one before (`writer`, `apply`,
  `attach`, `security_group`, `attempts`), and reads back. It never compares: the next pass of the
  loop does. What was read is kept until it is doubted (`memory`).

`cloud` makes the calls (`paths`, `failures`). `health` shows what Octavia says of members.
`leftovers` and `network_leftovers` serve `fairlead octavia gc`.

Two traps. Octavia locks a load balancer while it works on any part of it, and answers 409 to every
write meanwhile: one write at a time goes to one load balancer, also of several Services. And an
answer that is lost may have been a yes: after an error a look comes before everything else.

What is at Neutron has no driver of its own, though it has modules of its own: the writes of one
Service interleave with those to its load balancer. Rules come before the members that need them and
go after those; a floating IP is detached before its load balancer goes, under the same lock, so
that no guest comes in between; monitors of provider ovn are made again when a floating IP comes."""
