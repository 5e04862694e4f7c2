"""The OpenAI-compatible front door of engines that prefill and engines that decode.

Reading order: `flow` (what happens to a request), `door` (bodies, disconnects), `guard`
(quotas, connections), `engines` (health, choice), `upstream` (HTTP to engines),
`api` (what is changed in a request), `serve`.
"""
