"""A recipe's schema cannot change without a diff that a reviewer sees."""

from pathlib import Path

import gem.config
from gem_opkit.testing import check_contract_json


def test_contract_is_the_committed_one():
    check_contract_json(gem.config, Path(__file__).parent / "contract.json")
