"""A load generator for any OpenAI-compatible server: `inferlab bench serve`.

    sse.py        server-sent events out of bytes that may be split anywhere
    client.py     one request over HTTP: what came back, and when
    probe.py      before the load: the model, and what the server takes
    loop.py       when to send
    intervals.py  how far a percentile or a share may be off
    report.py     from outcomes to figures
    show.py       the figures as text
    run.py        a whole load: what the server takes, warm-up, sending

Latency is counted from the moment a request was planned to be sent. A generator that counts from the moment it got
round to sending leaves out exactly the waits that a slow server causes: coordinated omission (Gil Tene, wrk2).
"""
