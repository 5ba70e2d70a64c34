"""What `make matrix` reads in the installed vLLM's text is what importing it finds."""

from pathlib import Path

import pytest
import vllm

from vllm_commext.compat import seams
from vllm_commext.compat.seam_table import SEAMS, Seam

SITE = Path(vllm.__file__).parents[1]


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_text_and_import_agree(seam: Seam) -> None:
    from seams.source_view import SourceView

    text = seams.check(seam, vllm.__version__, SourceView(SITE))
    assert text.state is seams.check(seam, vllm.__version__).state
