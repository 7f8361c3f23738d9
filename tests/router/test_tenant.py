"""Who asks, as the metadata of a call tells."""

from baton.router.public.access import tenant_of, tenant_of_key


def test_a_key_is_a_tenant_and_is_not_kept() -> None:
    tenant = tenant_of((("x-request-id", "1"), ("authorization", "Bearer secret-key")))
    assert tenant == tenant_of((("authorization", "bearer  secret-key"),)) == tenant_of_key("secret-key")
    assert tenant != tenant_of((("authorization", "Bearer other-key"),))
    assert tenant and "secret" not in tenant


def test_without_a_key_all_are_one_tenant() -> None:
    assert tenant_of(()) == ""
    for value in ("Basic abc", "Bearer ", b"Bearer key"):
        assert tenant_of((("authorization", value),)) == ""
