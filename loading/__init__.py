"""Other people's files: each format that others define is read here and nowhere else.

config.py         config.json -> the fields of model.Config
vocabularies.py   tokenizer files of three libraries -> the fields of tokenizer.Tokenizer
templates.py      chat templates, rendered in a process of their own
files.py          a folder's JSON and safetensors, checked when they are read, written whole or not at all
foreign.py        quantized weights of other programs: which matrices of a folder, and what they become here
quantization.py   what their config.json says;  layouts.py, floats.py  where they keep codes and scales
merged.py         gpt-oss's experts, which stand in one tensor
gguf.py           llama.cpp's files: their keys and tensors, checked; their blocks as parts of our formats
gguf_folder.py    what a folder's JSON and vocabulary files would say, from such a file's keys
"""
