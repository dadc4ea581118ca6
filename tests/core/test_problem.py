"""What belongs to any problem: how many clients share a tile."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fednormec.core.problem import tile_size


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5000), st.integers(1, 2**24))
def test_tiles_are_balanced_and_fit(num_clients: int, dim: int) -> None:
    tile = tile_size(num_clients, dim)
    tiles = -(-num_clients // tile)
    assert 1 <= tile <= min(128, num_clients) and (tile == 1 or tile * dim <= 2**23)
    assert tile * tiles - num_clients < tiles, "the last one lacks at most one client for each of the others"
    assert tiles > 7 or tiles % 2 == 0 or tile == 1 or tiles == 1
    assert tiles > 1 or num_clients == 1 or num_clients * dim <= 2**17
