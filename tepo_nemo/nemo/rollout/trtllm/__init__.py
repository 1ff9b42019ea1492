"""TensorRT-LLM inside the training processes, through NeMo's exporter.

An engine is built once from the weights of the moment and refitted with the current ones before each rollout.
It shares the layout of training but for pipeline stages: each stage has an engine of the whole model, and
takes a part of the rows.

Written against NeMo 2.2 and TensorRT-LLM 0.16 and 0.17 from their sources, and tested on the real exporter of
NeMo and Megatron-core with a stand-in for the binary packages. It has never run on a GPU. The first run there
should look at: the build, the comparison of weight names, and the rollout check of the first two steps.

`tensorrt_llm` starts MPI when it is imported, so that nothing here imports it before a backend is made.
"""
