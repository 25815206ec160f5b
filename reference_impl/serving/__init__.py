"""An OpenAI-compatible HTTP server over the engine: `inferlab serve MODEL`.

protocol.py    what may be asked, and what is refused
runner.py      the engine in a thread of its own, and the streams that it feeds
answers.py     what is answered, whole or in pieces
connection.py  one HTTP answer: it ends when the client goes, and never hangs on one that does not read
app.py         the routes
metrics.py     Prometheus;  status.py  a page to watch
server.py      start, signals, shutdown
"""
