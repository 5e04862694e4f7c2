# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible router in front of prefill and decode engines.

Reading order: `flow` (the life of a request), `app` (routes, status and metrics), `clients` (their
connections, requests and answers), `http1` (messages as bytes, for clients and engines), `placing`
(where a request goes), `guard` (quotas, bodies, overdue connections), `api` (what changes in a
request; configuration), `server` (sockets, TLS, restarts), `admin` and `keys` (who may change the
fleet, who may ask), `spans` (traces).
"""
