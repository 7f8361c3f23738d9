"""Who calls. The one place where HTTP headers become a tenant."""

from starlette.datastructures import Headers

from router import tenant


def tenant_of(headers: Headers) -> str:
    """The same as for a gRPC call with the same `authorization: Bearer KEY`; "" without one."""
    return tenant.tenant_of(headers.items())
