"""A pytest plugin for a Python without torch and the host: what needs them is skipped."""

import pytest

HEAVY = {"torch", "transformers", "tokenizers", "nemo", "nemo_aligner", "megatron", "scipy"}


def _missing(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is the absence of a heavy package."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in HEAVY:
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and _missing(call.excinfo.value):
        _skip(report, item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.failed and "ModuleNotFoundError: No module named" in str(report.longrepr):
        _skip(report, collector)
    return report


def _skip(report, node) -> None:
    report.outcome, report.longrepr = "skipped", (str(node.path), None, "needs a heavy package")
