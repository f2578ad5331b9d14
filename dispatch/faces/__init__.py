"""Public interfaces over the exchanges: DeepEP's V1 `Buffer` and its newer `ElasticBuffer`. `dispatch` exports them."""
