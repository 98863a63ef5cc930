"""The fields of Pods, as types.

Values only, by the rules of `fields`. The lab uses few of them; all are listed, so that misspelt
fields are reported, and so that each list merges by its own rule. Follows the API reference of
Kubernetes 1.36.
"""

from fairlead.kube.rules.fields import AnyObject, Fields, KindFields, Quantities, Strings

Objects = list[AnyObject]


class ResourceRequirements(Fields):
    limits: Quantities | None = None
    requests: Quantities | None = None
    claims: Objects | None = None


class ContainerPort(Fields):
    name: str | None = None
    container_port: int | None = None
    protocol: str | None = None
    host_port: int | None = None
    host_ip: str | None = None


class Container(Fields):
    name: str | None = None
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    working_dir: str | None = None
    ports: list[ContainerPort] | None = None
    env_from: Objects | None = None
    env: Objects | None = None
    resources: ResourceRequirements | None = None
    resize_policy: Objects | None = None
    restart_policy: str | None = None
    volume_mounts: Objects | None = None
    volume_devices: Objects | None = None
    liveness_probe: AnyObject | None = None
    readiness_probe: AnyObject | None = None
    startup_probe: AnyObject | None = None
    lifecycle: AnyObject | None = None
    termination_message_path: str | None = None
    termination_message_policy: str | None = None
    image_pull_policy: str | None = None
    security_context: AnyObject | None = None
    stdin: bool | None = None
    stdin_once: bool | None = None
    tty: bool | None = None
    restart_policy_rules: Objects | None = None


class EphemeralContainer(Container):
    target_container_name: str | None = None


class PodSpec(Fields):
    volumes: Objects | None = None
    init_containers: list[Container] | None = None
    containers: list[Container] | None = None
    ephemeral_containers: list[EphemeralContainer] | None = None
    restart_policy: str | None = None
    termination_grace_period_seconds: int | None = None
    active_deadline_seconds: int | None = None
    dns_policy: str | None = None
    node_selector: Strings | None = None
    service_account_name: str | None = None
    service_account: str | None = None
    automount_service_account_token: bool | None = None
    node_name: str | None = None
    host_network: bool | None = None
    host_pid: bool | None = None
    host_ipc: bool | None = None
    host_users: bool | None = None
    share_process_namespace: bool | None = None
    security_context: AnyObject | None = None
    image_pull_secrets: Objects | None = None
    hostname: str | None = None
    subdomain: str | None = None
    affinity: AnyObject | None = None
    scheduler_name: str | None = None
    tolerations: Objects | None = None
    host_aliases: Objects | None = None
    priority_class_name: str | None = None
    priority: int | None = None
    dns_config: AnyObject | None = None
    readiness_gates: Objects | None = None
    runtime_class_name: str | None = None
    enable_service_links: bool | None = None
    preemption_policy: str | None = None
    overhead: Quantities | None = None
    topology_spread_constraints: Objects | None = None
    set_hostname_as_fqdn: bool | None = None
    os: AnyObject | None = None
    scheduling_gates: Objects | None = None
    resource_claims: Objects | None = None
    resources: ResourceRequirements | None = None
    hostname_override: str | None = None
    scheduling_group: AnyObject | None = None


class PodCondition(Fields):
    type: str | None = None
    status: str | None = None
    reason: str | None = None
    message: str | None = None
    last_probe_time: str | None = None
    last_transition_time: str | None = None
    observed_generation: int | None = None


class PodStatus(Fields):
    phase: str | None = None
    conditions: list[PodCondition] | None = None
    message: str | None = None
    reason: str | None = None
    nominated_node_name: str | None = None
    host_ip: str | None = None
    host_ips: Objects | None = None
    pod_ip: str | None = None
    pod_ips: Objects | None = None
    start_time: str | None = None
    init_container_statuses: Objects | None = None
    container_statuses: Objects | None = None
    ephemeral_container_statuses: Objects | None = None
    qos_class: str | None = None
    resize: str | None = None
    resource_claim_statuses: Objects | None = None
    observed_generation: int | None = None
    resources: ResourceRequirements | None = None
    allocated_resources: Quantities | None = None
    extended_resource_claim_status: AnyObject | None = None
    node_allocatable_resource_claim_statuses: Objects | None = None


class Pod(KindFields):
    spec: PodSpec | None = None
    status: PodStatus | None = None
