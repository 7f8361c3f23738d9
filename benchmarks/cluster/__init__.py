"""Mechanisms of a whole cluster: overload, roles, failover, caches of several routers."""
