# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible router in front of prefill and decode engines.

Reading order: `flow` (the life of a request), `app` (routes, status and metrics), `clients`
(connections of clients, requests and answers), `http1` (messages as bytes, for clients and
engines), `placing` (where a request goes), `choice` and `rates` (expected times, the cheapest way,
learned costs), `cache/` (which engine holds which prefix), `fleet/` (the engines, connections to
them, and the admin API, which changes the fleet), `guard` (quotas, bodies, the line, retries),
`api` (what changes in a request; configuration), `server` (sockets, TLS, restarts), `keys` (who may
ask), `live` (the page), `spans` (traces).
"""
