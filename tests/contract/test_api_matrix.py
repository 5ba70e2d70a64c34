"""What `make matrix` reads in the installed vLLM's text is what importing it finds."""

from pathlib import Path

import pytest
import vllm

from vllm_commext.compat import api_probes
from vllm_commext.compat.api_checks import API_CHECKS
from vllm_commext.compat.api_probes import ApiCheck

SITE = Path(vllm.__file__).parents[1]


@pytest.mark.parametrize("api", API_CHECKS, ids=lambda api: api.name)
def test_text_and_import_agree(api: ApiCheck) -> None:
    from matrix.source_view import SourceView

    text = api_probes.check(api, vllm.__version__, SourceView(SITE))
    assert text.state is api_probes.check(api, vllm.__version__).state
