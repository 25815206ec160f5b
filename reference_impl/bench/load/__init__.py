"""A load generator for any OpenAI-compatible server: `inferlab bench serve`.

    sse.py        server-sent events out of bytes that may be split anywhere
    client.py     one request over HTTP: what came back, and when
    probe.py      before the load: the model, and which requests the server accepts
    loop.py       when to send
    intervals.py  how far a percentile or a share may be off
    report.py     from outcomes to figures
    show.py       the figures as text
    run.py        a whole load: probing, warm-up, sending

Latency is counted from the moment a request was planned to be sent. A generator that counts from the moment it managed
to send leaves out exactly the waits that a slow server causes: coordinated omission (Gil Tene, wrk2).
"""
