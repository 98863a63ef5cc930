"""The texts of the pages: code, meaning, how it is known, remedy, source. Pure."""

TEXTS: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "SelectorMatchesNothing",
        "No pod has the labels that the Service selects, so the Service has no endpoint, and "
        "clients time out or are refused. Usually a label is misspelled, or a workload is scaled "
        "to 0 or cannot create its pods.",
        "The selector, the labels of the pods of the namespace, and the templates of Deployments, "
        "StatefulSets and DaemonSets. The nearest pod, which has all labels but one, is named. "
        "Nothing is reported while a new workload is about to create its pods.",
        "The Service's owner corrects the selector or the labels of the pods, scales the workload, "
        "or finds in its Events why it creates no pod.",
        "API reference of core/v1, ServiceSpec.selector.",
    ),
    (
        "TargetPortNameUnknown",
        "The targetPort of the Service is a name that no container port of its pods has, so the "
        "pods are no endpoints of this port.",
        "The names of the container ports of the same protocol. If only some pods lack the name, "
        "it is reported after all of them are older than the grace period, because a rollout may "
        "introduce the name.",
        "The Service's owner uses a name that the pods have, or names the container port.",
        "API reference of core/v1, ServicePort.targetPort.",
    ),
    (
        "PortNameDiffers",
        "The Service has no selector, and its EndpointSlices have no port of the name of the "
        "Service's port. Service proxies join the two by their names, so the port has no endpoint.",
        "The names and protocols of the ports of the Service and of its EndpointSlices that have "
        "endpoints.",
        "The owner of the EndpointSlice gives its port the name of the Service's port. An unnamed "
        "port has the empty name.",
        "KEP-752 (EndpointSlice), EndpointPort.name.",
    ),
    (
        "PodsNotReady",
        "The pods of the Service are not ready, so they get no traffic; with externalTrafficPolicy "
        "Local the health ports of all nodes answer 503.",
        "The conditions of the pods, and their last Warning Event, which has the output of the "
        "probe. It is reported after the grace period, and after ten times the grace period while "
        "another pod is ready.",
        "The Service's owner finds the cause with `kubectl describe pod`.",
        "Kubernetes documentation, Pod Lifecycle, section Pod readiness.",
    ),
    (
        "AllTerminating",
        "All endpoints are terminating, and Kubernetes sends traffic to them because there is no "
        "other. When they end, the Service has no endpoint.",
        "The conditions of the endpoints, and the deletionTimestamp of the pods.",
        "The Service's owner lets a rollout start new pods first: maxUnavailable below 100 %, and "
        "a PodDisruptionBudget for drains.",
        "KEP-1669 (terminating endpoints).",
    ),
    (
        "EndpointsWithoutNode",
        "No ready endpoint names the node on which it is. With externalTrafficPolicy Local a node "
        "serves only endpoints that name it, so no node serves the Service.",
        "nodeName of the ready endpoints. EndpointSlices that are mirrored from Endpoints, or "
        "written by hand, often lack it.",
        "The owner of the EndpointSlice sets nodeName, or the Service's owner sets "
        "externalTrafficPolicy to Cluster.",
        "KEP-752 (EndpointSlice), Endpoint.nodeName; kubernetes/kubernetes#121231.",
    ),
    (
        "ExcludedNode",
        "All nodes with ready pods of the Service have the label "
        "`node.kubernetes.io/exclude-from-external-load-balancers`. With externalTrafficPolicy "
        "Local the other nodes cannot serve the Service. With Cluster, all nodes of the cluster "
        "have the label. kubeadm and Talos give it to nodes of the control plane.",
        "The labels of the Nodes, and the nodes of the ready endpoints. A cordoned node is not "
        "excluded. It is an error where the load balancer certainly leaves out such nodes: "
        "Fairlead without `announce.ignoreExcludeLabel`, and clouds. Otherwise it is a warning "
        "that names the condition, such as MetalLB's option `--ignore-exclude-lb`. kube-vip, "
        "klipper and Cilium do not read the label.",
        "The cluster's operator removes the label, moves the pods, or sets that option.",
        "KEP-1143 (node role labels), well-known labels of Kubernetes; "
        "[configuration.md](configuration.md#announce-for-the-controller-and-gateways); "
        "metallb/metallb#2274.",
    ),
    (
        "ClassUnserved",
        "No controller has taken up the Service, so it gets no address: none serves its "
        "loadBalancerClass, or Services without a class, or the one that does is down or has no "
        "addresses that it may assign.",
        "The Service is older than the grace period and no controller has left an address, a "
        "condition, a finalizer, an Event or a status on it; or the class is of the domain "
        "`fairlead.io` and unknown, or no controller of Fairlead renews its Lease. MetalLB and "
        "Cilium write nothing on a Service before they have a pool, and kube-vip nothing without "
        "an address for it.",
        "The Service's owner changes the class, which the API allows only by way of another type, "
        "or the cluster's operator installs the controller or gives it addresses.",
        "KEP-1959 (loadBalancerClass).",
    ),
    (
        "TwoControllers",
        "Two controllers write the addresses of the same Service and overwrite each other.",
        "The field managers of `status.loadBalancer` while the doctor watches the Service for two "
        "seconds: one of them wrote again after the other. A single change of the writer is a "
        "migration, and is not reported.",
        "The cluster's operator excludes the Service from one of them, with a loadBalancerClass or "
        "an option of the controller; see [migration.md](migration.md).",
        "KEP-555 (server-side apply), managedFields.",
    ),
    (
        "AddressElsewhere",
        "The Service requests an address and does not get it, because another Service has it, the "
        "cluster itself uses it, or no pool contains it.",
        "The request in annotations and in spec.loadBalancerIP, the addresses of all Services, "
        "AddressGrants, and the pools of Fairlead; with Cilium its condition.",
        "The Service's owner requests another address, or the cluster's operator adds the address "
        "to a pool; see [addresses.md](addresses.md).",
        "API reference of core/v1, ServiceSpec.loadBalancerIP.",
    ),
    (
        "AddressExcluded",
        "The Service has an address of a Node. The node keeps the packets, so that clients reach "
        "the node itself and never the Service.",
        "The address in the status, and the addresses in the status of Nodes, for Services of "
        "Fairlead and MetalLB. klipper publishes addresses of nodes intentionally.",
        "The cluster's operator takes the addresses of Nodes out of the pools, and gives the "
        "Service another address.",
        "kubernetes/kubernetes#114815, metallb/metallb#679.",
    ),
    (
        "PoolExhausted",
        "Every address of the pools that the Service may use is assigned, reserved, or used by the "
        "cluster itself.",
        "The ranges of the pools, the addresses of all Services, and AddressGrants. With MetalLB "
        "its Event `AllocationFailed`, which does not tell whether a pool is full, or leaves out "
        "the Service (`autoAssign`, `serviceAllocation`, the family); with Cilium its condition. "
        "Nothing is said about pools that select namespaces by their labels.",
        "The cluster's operator extends the pool or deletes Services; Services of one namespace "
        "can share an address ([addresses.md](addresses.md)).",
        "Documentation of MetalLB (usage), and of Cilium (LB IPAM).",
    ),
    (
        "NodePortMissing",
        "The Service has allocateLoadBalancerNodePorts false, and its load balancer reaches nodes "
        "by node ports.",
        "The ports of the Service, and the error of the port, the condition or the Event of the "
        "controller.",
        "The Service's owner sets allocateLoadBalancerNodePorts to true, or uses a class that "
        "needs no node ports.",
        "KEP-1864 (allocateLoadBalancerNodePorts).",
    ),
    (
        "SourceRangeForgetsPods",
        "The source ranges do not include the pod CIDRs. The service proxy of a node applies the "
        "ranges to pods too when they call the load-balancer address, so callers inside are "
        "dropped while clients outside are served.",
        "The ranges, the pod CIDRs of the Nodes or of the configuration, and ipMode: with `Proxy`, "
        "callers inside go through the load balancer. Ranges that contain a CIDR together count "
        "as one.",
        "The Service's owner adds the pod CIDRs, or callers inside use the name of the Service.",
        "Kubernetes documentation, ServiceSpec.loadBalancerSourceRanges; KEP-1860 (ipMode).",
    ),
    (
        "SourceRangeForgetsFamily",
        "A dual-stack Service has source ranges of one family only, so all clients of the other "
        "family are dropped.",
        "The ranges, and the families of the addresses.",
        "The Service's owner adds a range of the other family.",
        "KEP-563 (dual stack), ServiceSpec.loadBalancerSourceRanges.",
    ),
    (
        "UnfairByPlacement",
        "The nodes have different numbers of ready pods and each node gets the same share, so a "
        "pod that is alone on its node gets much more than others.",
        "The nodes of the ready pods, with externalTrafficPolicy Local. Octavia, MetalLB with BGP "
        "and Cilium with BGP give each node the same share; of clouds and unknown load balancers "
        "this is assumed, and said. It is reported from 1.5 times the fair share on, for three "
        "pods or more, and not during a rollout, nor where one node gets everything, as with "
        "announcements on layer 2.",
        "The Service's owner spreads the pods evenly, or uses a class that weighs nodes, such as "
        "`fairlead.io/direct`.",
        "Kubernetes documentation, Create an External Load Balancer, section Caveats.",
    ),
    (
        "FinalizerOrphaned",
        "The Service is being deleted and stays, because the controller that has to remove its "
        "finalizer is gone.",
        "deletionTimestamp and finalizers. For Fairlead: no controller renews its Lease. For other "
        "controllers, which cannot be observed, it is reported after ten times the grace period. "
        "A Warning Event since the deletion tells that the controller runs, and why it fails.",
        "The cluster's operator starts the controller again. If it is uninstalled, remove the "
        "finalizer, and then what the controller left outside of the cluster, such as a load "
        "balancer of the cloud.",
        "Kubernetes documentation, Finalizers, and service.kubernetes.io/load-balancer-cleanup.",
    ),
    (
        "NetworkPolicyDropsClients",
        "NetworkPolicies admit only addresses of the cluster. With externalTrafficPolicy Local "
        "pods see the clients' own addresses, so a network plugin that enforces policies drops all "
        "clients from outside.",
        "The NetworkPolicies that select the ready pods: none of their rules admits, at the port, "
        "an address that is neither of a pod nor of a node. It is a warning, because the API does "
        "not show whether the network plugin enforces policies.",
        "The Service's owner adds a rule with the clients' addresses.",
        "API reference of networking.k8s.io/v1; Kubernetes documentation, Network Policies, "
        "section on ipBlock selectors.",
    ),
    (
        "ApiForbidden",
        "A role of Fairlead has not all rights that it needs: a ClusterRole was edited, or is of "
        "an older version. What the role cannot read or write, it cannot serve.",
        "A SubjectAccessReview for each right that the chart grants to the ServiceAccount of the "
        "role. The caller needs the right to create these reviews.",
        "The cluster's operator applies the chart or the manifests of the installed version again.",
        "API reference of authorization.k8s.io/v1; `deploy/manifests`.",
    ),
    (
        "GatewaysDiffer",
        "A gateway cannot serve Services that another one serves, so some connections fail, "
        "depending on the gateway that the router chooses.",
        "The Leases of the live gateways list the Services that each cannot serve. It is reported "
        "when the process is older than the grace period.",
        "The cluster's operator reads the message, and compares the configuration of the hosts.",
        "[install.md](install.md#which-processes-run).",
    ),
    (
        "GatewayStale",
        "A gateway or node does not renew its Lease, or its view of the cluster is stale. Its "
        "kernel continues to forward by the last view, so packets may go to pods that are gone.",
        "The Lease: the doctor waits until each process has renewed it, or its duration is over.",
        "The cluster's operator restores the host's access to the API server, or starts the "
        "process.",
        "KEP-589 (Leases as heartbeats); [install.md](install.md#which-processes-run).",
    ),
    (
        "AddressPending",
        "The Service has no address, or requires two families (`ipFamilyPolicy: RequireDualStack`) "
        "and has addresses of one, and the doctor knows no other cause than what its controller "
        "reports.",
        "The conditions and Warning Events of the Service. If its controller reports nothing, it "
        "is reported after ten times the grace period.",
        "As the controller's message says.",
        "API reference of core/v1, ServiceStatus.loadBalancer.",
    ),
    (
        "ChangeFailed",
        "The controller of a Service that has an address could not do as its owner wants. The load "
        "balancer serves by its earlier state, so that new nodes get no traffic; or it ignores the "
        "source ranges, so that everybody is admitted.",
        "The latest Warning Event of the controller, if no Event has reported a success since: "
        "SyncLoadBalancerFailed, UpdateLoadBalancerFailed and UnAvailableLoadBalancer of clouds, "
        "FailedBuildModel and FailedDeployModel of the AWS Load Balancer Controller. Also "
        "announceFailed of MetalLB and LoadBalancerSourceRangesIgnored of OpenStack's controller, "
        "until Kubernetes deletes the Event after an hour.",
        "As the controller's message says.",
        "k8s.io/cloud-provider, controllers/service; controllers of the other projects.",
    ),
    (
        "ConditionFalse",
        "A condition of Fairlead is False, for a reason that no other finding names.",
        "The condition of the Service, when it has been False for the grace period.",
        "As the message says; see [status.md](status.md).",
        "[status.md](status.md#conditions).",
    ),
)
