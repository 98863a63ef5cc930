"""The rules of the API server for objects that are written: what it adds and what it rejects. Pure,
except that they modify the object in place where they say so.

`fairlead plan` applies them to manifests that were never sent to a server, and the API server of
the lab to every write. `fields` has the fields of each kind, and `types` checks their types;
`defaults`, `families` and `allocation` complete a Service, and `service` and `metadata` validate
it; `endpoints` validates an EndpointSlice; `names` checks the syntax of names and addresses, and
`causes` are the errors. Follows Kubernetes 1.36."""
