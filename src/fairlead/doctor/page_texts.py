"""The texts of the pages: id, meaning, how it is known, remedy. Pure."""

TEXTS: tuple[tuple[str, str, str, str], ...] = (
    (
        "selector-matches-nothing",
        "No pod has the labels that the Service selects, so the Service has no endpoint, and "
        "clients time out or are refused. Usually a label is misspelled, or a workload is scaled "
        "to 0.",
        "The selector and the labels of the pods of the namespace. The nearest pod, which has all "
        "labels but one, is named. Nothing is reported if a Deployment, StatefulSet or DaemonSet "
        "has the labels in its template and is about to create pods.",
        "The Service's owner corrects the selector or the labels of the pods, or scales the "
        "workload.",
    ),
    (
        "target-port-name-unknown",
        "The targetPort of the Service is a name that no container port of its pods has, so the "
        "pods are no endpoints of this port.",
        "The names of the container ports of the same protocol. If only some pods lack the name, "
        "it is reported after all of them are older than the grace period, because a rollout may "
        "introduce the name.",
        "The Service's owner uses a name that the pods have, or names the container port.",
    ),
    (
        "target-port-closed",
        "The pods are ready, and refuse connections to the target port: the process uses another "
        "port, or listens on 127.0.0.1 only.",
        "A connection from this host to each ready pod, only with `--connect`, on a host or in a "
        "pod from which pods are reachable. It is reported if a pod answers with a refusal and no "
        "pod accepts the connection. A connection without an answer proves nothing.",
        "The Service's owner sets targetPort to the port of the process, or lets the process "
        "listen on all addresses. A readiness probe of this port would have shown the fault.",
    ),
    (
        "pods-not-ready",
        "The pods of the Service are not ready, so they get no traffic; with "
        "externalTrafficPolicy Local the health ports of all nodes answer 503.",
        "The conditions of the pods, and their last Warning Event, which has the output of the "
        "probe. It is reported after the grace period, and after ten times the grace period while "
        "another pod is ready.",
        "The Service's owner finds the cause with `kubectl describe pod`.",
    ),
    (
        "all-terminating",
        "All endpoints are terminating, and Kubernetes sends traffic to them because there is no "
        "other (KEP-1669). When they end, the Service has no endpoint.",
        "The conditions of the endpoints, and the deletionTimestamp of the pods.",
        "The Service's owner lets a rollout start new pods first: maxUnavailable below 100 %, and "
        "a PodDisruptionBudget for drains.",
    ),
    (
        "class-unserved",
        "No controller serves the loadBalancerClass of the Service, so it never gets an address.",
        "The Service is older than the grace period and no controller has left an address, a "
        "condition, a finalizer, an Event or a status on it; or the class is of the domain "
        "`fairlead.io` and unknown, or no controller of Fairlead renews its Lease.",
        "The Service's owner creates the Service again with a class that is served (the field is "
        "immutable), or the cluster's operator installs the controller.",
    ),
    (
        "two-controllers",
        "Two controllers write the addresses of the same Service and overwrite each other.",
        "The field managers of `status.loadBalancer` while doctor watches the Service for two "
        "seconds: one of them wrote again after the other. A single change of the writer is a "
        "migration, and is not reported.",
        "The cluster's operator excludes the Service from one of them, with a loadBalancerClass "
        "or the option of the controller; see [migration.md](migration.md).",
    ),
    (
        "address-elsewhere",
        "The Service requests an address and does not get it, because another Service has it or "
        "no pool contains it.",
        "The request in annotations and in spec.loadBalancerIP, the addresses of all Services, "
        "AddressGrants, and the pools of Fairlead.",
        "The Service's owner requests another address, or the cluster's operator adds the address "
        "to a pool; see [addresses.md](addresses.md).",
    ),
    (
        "pool-exhausted",
        "Every address of the pools that the Service may use is assigned or reserved.",
        "The ranges of the pools, the addresses of all Services, and AddressGrants. With MetalLB, "
        "its Event `AllocationFailed`. Nothing is said about pools that select namespaces by "
        "their labels.",
        "The cluster's operator extends the pool or deletes Services; Services of one namespace "
        "can share an address ([addresses.md](addresses.md)).",
    ),
    (
        "excluded-node",
        "All nodes with ready pods of the Service have the label "
        "`node.kubernetes.io/exclude-from-external-load-balancers`. With externalTrafficPolicy "
        "Local the other nodes cannot serve the Service.",
        "The labels of the Nodes, and the nodes of the ready endpoints. A cordoned node is not "
        "excluded.",
        "The cluster's operator removes the label, or moves the pods.",
    ),
    (
        "source-range-lacks-pods",
        "The source ranges do not include the pod CIDRs. The service proxy of a node applies the "
        "ranges to pods too when they call the load-balancer address, so callers inside are "
        "dropped while clients outside are served.",
        "The ranges, spec.podCIDRs of the Nodes, and ipMode: with `Proxy`, callers inside go "
        "through the load balancer. It is a risk and not a fault, because perhaps no pod calls the "
        "address.",
        "The Service's owner adds the pod CIDRs, or callers inside use the name of the Service.",
    ),
    (
        "source-range-lacks-family",
        "A dual-stack Service has source ranges of one family only, so all clients of the other "
        "family are dropped.",
        "The ranges, and the families of the addresses.",
        "The Service's owner adds a range of the other family.",
    ),
    (
        "affinity-behind-nat",
        "With sessionAffinity ClientIP all connections of one load balancer go to the same pod, "
        "because nodes see the load balancer's address instead of the clients'.",
        "sessionAffinity and ipMode Proxy. Clients that share the address of a NAT outside of the "
        "cluster cannot be told from the API.",
        "The Service's owner removes sessionAffinity, uses the affinity of the load balancer, or "
        "a class that keeps the client's address.",
    ),
    (
        "unfair-by-placement",
        "The nodes have different numbers of ready pods and each node gets the same share, so a "
        "pod that is alone on its node gets much more than others.",
        "The nodes of the ready pods, with externalTrafficPolicy Local and a load balancer that "
        "does not weigh nodes. It is reported from 1.5 times the fair share on, for three pods or "
        "more, and not during a rollout.",
        "The Service's owner spreads the pods evenly, or uses a class that weighs nodes, such as "
        "`fairlead.io/direct`.",
    ),
    (
        "finalizer-orphaned",
        "The Service is being deleted and stays, because the controller that has to remove its "
        "finalizer is gone.",
        "deletionTimestamp and finalizers. For Fairlead: no controller renews its Lease. For "
        "other controllers, which cannot be observed, it is reported after ten times the grace "
        "period.",
        "The cluster's operator starts the controller again. If it is uninstalled, remove the "
        "finalizer, and then what the controller left outside of the cluster, such as a load "
        "balancer of the cloud.",
    ),
    (
        "nodeport-missing",
        "The Service has allocateLoadBalancerNodePorts false, and its load balancer reaches nodes "
        "by node ports.",
        "The ports of the Service, and the error of the port or the Event of the controller.",
        "The Service's owner sets allocateLoadBalancerNodePorts to true, or uses a class that "
        "needs no node ports.",
    ),
    (
        "address-pending",
        "The Service has no address, and its controller says why; doctor knows no other cause.",
        "The conditions and Warning Events of the Service.",
        "As the controller's message says.",
    ),
    (
        "condition-false",
        "A condition of Fairlead is False, for a reason that no other finding names.",
        "The condition of the Service, when it has been False for the grace period.",
        "As the message says; see [status.md](status.md).",
    ),
    (
        "network-policy-drops-clients",
        "NetworkPolicies admit only addresses of the cluster. With externalTrafficPolicy Local "
        "pods see the clients' own addresses, so a network plugin that enforces policies drops "
        "all clients from outside.",
        "The NetworkPolicies that select the ready pods: none of their rules admits, at the port, "
        "an address that is neither of a pod nor of a node. It is a risk, because the API does "
        "not show whether the network plugin enforces policies.",
        "The Service's owner adds a rule with the clients' addresses.",
    ),
    (
        "bgp-down",
        "A BGP session of a gateway or node is not established, so its neighbor learns no address "
        "from it.",
        "The sessions of the host's Announcer, with the last error (a wrong AS number or "
        "password, an unreachable neighbor, an expired hold timer), while the process renews its "
        "Lease.",
        "The network's operator compares the configuration of both sides; see "
        "[announce.md](announce.md).",
    ),
    (
        "address-conflict",
        "Another host of the link answers for an address that Fairlead announces, so some clients "
        "reach the other host.",
        "The conflicts of an Announcer: the MAC address of the other host, and the interface.",
        "The network's operator finds the host by its MAC address and removes the address.",
    ),
    (
        "gateways-differ",
        "A gateway cannot serve Services that another one serves, so some connections fail, "
        "depending on the gateway that the router chooses.",
        "The Leases of the live gateways list the Services that each cannot serve. It is reported "
        "when the process is older than the grace period.",
        "The cluster's operator reads the message, and compares the configuration of the hosts.",
    ),
    (
        "gateway-stale",
        "A gateway or node does not renew its Lease, or its view of the cluster is stale. Its "
        "kernel continues to forward by the last view, so packets may go to pods that are gone.",
        "The Lease: doctor waits until each process has renewed it, or its duration is over.",
        "The cluster's operator restores the host's access to the API server, or starts the "
        "process.",
    ),
)
