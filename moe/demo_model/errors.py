"""The errors of the demo model, apart so that every file of the package can raise them."""


class DemoModelError(RuntimeError):
    """The demo model could not be made; the message says why and what to do."""


class DemoSourceError(DemoModelError):
    """The packaged weights could not be downloaded, or are not the expected ones."""
