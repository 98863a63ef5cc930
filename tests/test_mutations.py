"""The changes that `make mutations` makes still fit the product."""

from tests.mutations import MUTATIONS, ROOT, check


def test_each_mutation_changes_one_place_of_the_product() -> None:
    check(MUTATIONS, ROOT)
