"""The Kubernetes API: objects, client, authentication, reflector, Leases and Events.

Read `objects` first (the fields that are read), then `client` (one call each) and `reflector` (list
and watch). `access`, `auth` and `kubeconfig` find the API server and the credentials; `connection`
carries the requests; `answers` turns failed responses into errors. `lease` elects a leader,
`presence` and `instances` show which processes are alive, `freshness` how current the watches are,
`events` writes Events. `manifests` reads the same objects from files."""
