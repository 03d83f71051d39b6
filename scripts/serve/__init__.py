"""`python -m scripts.serve`: an OpenAI-compatible server, with a page of its own.

__main__.py                  the start: flags, before torch; serve_flags.py has them
serve.py, serve.html         paths, connections and signals; the page, with markdown.js
batches.py, metrics.py       answers that wait and decode; what is counted of them
openai_form.py, responses.py, other_servers.py
                             requests and answers as OpenAI has them, and keys of other servers
message_form.py, message_parser.py, tool_calls.py
                             tools, thoughts and schemas: forced into an answer, and read from it
"""
