"""Run code written for `deep_ep` on WideEP: `python -m dispatch.deep_ep_shim script.py args...`, see `__main__`."""
