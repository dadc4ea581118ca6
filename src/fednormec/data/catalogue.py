"""Catalogue of the built-in data sets: what each is, under which terms, and whether it is there."""

from typing import Any

from fednormec.data.cache import Published, read_cache
from fednormec.data.federations import FEDERATIONS
from fednormec.data.images import IMAGE_SETS
from fednormec.errors import UserError


def catalogue() -> dict[str, dict[str, Any]]:
    """Lists every built-in data set: what it is, where it is stored, and whether it is there and intact."""
    rows: dict[str, dict[str, Any]] = {
        "digits": {
            "about": "1,797 handwritten digits, 1x8x8, that come with scikit-learn",
            "terms": "CC BY 4.0",
            "path": None,
            "fetched": True,
            "verified": True,
        }
    }
    for name, images in IMAGE_SETS.items():
        rows[name] = {"about": images.about, "terms": images.terms, **_stored(images)}
    for name, one in FEDERATIONS.items():
        rows[name] = {
            "about": one.about,
            "clients": f"{one.clients:,} {one.owners}",
            "examples": f"{one.examples:,}",
            "predicts": one.predicts,
            "test": one.test,
            "terms": one.terms,
            "package": one.package,
            **_stored(one),
        }
    return rows


def _stored(published: Published) -> dict[str, Any]:
    try:
        read_cache(published)
        verified = True
    except UserError:
        verified = False
    return {"path": str(published.path), "fetched": published.path.exists(), "verified": verified}
