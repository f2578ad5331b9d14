"""The public interfaces over the core: DeepEP's V1 `Buffer` and its newer `ElasticBuffer`. `dispatch` hands them out."""
