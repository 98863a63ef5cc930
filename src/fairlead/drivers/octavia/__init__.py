"""The driver of class `fairlead.io/octavia`: load balancers of OpenStack through Octavia's API,
with floating IPs and a security group through Neutron's.

`driver` has the four methods of `fairlead.drivers.Driver`:

* `render` makes a BalancerSpec of a LoadBalancer (`render`, `balancers`, `marks`).
* `read` reads BalancerStates (`read`, `answers`), locates load balancers that a Service shares or
  adopts (`locate`), and adds the objects at Neutron (`network`, `neutron`, `security_group`).
* `diff` returns the necessary writes, each of them a value that prints as a request (`diff`,
  `parts`, `members`, `floating`, `security`, `bodies`, `changes`). Pure. If no write helps now
  (Octavia is working, a port is in use, attempts have failed), it returns a `Blocked`, which
  carries an Outcome (`blocked`).
* `apply` makes the writes, each after Octavia has finished the previous one (`writer`, `apply`,
  `attach`, `security_group`, `attempts`), and reads the result, which stays in memory until it is
  invalidated (`memory`). The comparison of the result with the plan is left to the next pass of the
  loop.

`cloud` makes the calls (`paths`, `failures`). `health` reports the operating status of members.
`leftovers` and `network_leftovers` serve `fairlead octavia gc`.

Two properties of Octavia determine the design. First, Octavia locks a load balancer while it works
on any part of it, and answers 409 to every write meanwhile. Therefore each load balancer gets one
write at a time, also when several Services share it. Second, a request whose answer was lost may
have succeeded. Therefore, after every error, the driver reads before it writes again.

Objects at Neutron have modules of their own but no driver of their own, because their writes
interleave with the writes to the load balancer. Rules are created before the members that need them
and deleted after these members. A floating IP is detached before its load balancer is deleted,
under the same lock, so that no other Service joins the load balancer in between. Monitors of
provider ovn are recreated when a floating IP is attached."""
