"""An OpenAI-compatible router in front of prefill and decode engines.

Reading order: `flow` (the life of a request), `app` (routes, bodies, disconnects, the server),
`guard` (quotas, connections), `engines` (health, choice, HTTP to engines), `api` (what changes in a
request; configuration), `metrics`.
"""
