"""The planner outside a service: DeepSeek EPLB's function, and a simulation of policies on a recorded load."""
