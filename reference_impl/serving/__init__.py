"""An OpenAI-compatible HTTP server over the engine: `inferlab serve MODEL`.

protocol.py    what may be asked, and what is refused
runner.py      the engine as the event loop sees it: commands go to it, streams come back
worker.py      the engine's side: runs commands between steps;  process.py  in a process of its own, the socket between
supervision.py starts that process again when it ends
questions.py   what may be asked of the engine meanwhile;  ../prompts.py  text to tokens, without the engine
answers.py     what is answered, whole or in pieces
connection.py  one HTTP answer: it ends when the client goes, and never hangs on one that does not read
limits.py      what a connection is given: time, bytes, a place
app.py         the routes;  refusals.py  what is refused, in OpenAI's shape;  description.py  for OpenAPI
metrics.py     Prometheus;  status.py  a page to watch
server.py      start, signals, shutdown
"""
