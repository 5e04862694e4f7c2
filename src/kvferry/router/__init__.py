# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible router in front of prefill and decode engines.

Reading order: `flow` (the life of a request), `app` (routes, status and metrics), `clients` (their
connections, requests and answers), `http1` (messages as bytes, for clients and engines),
`engines` (the fleet: roles, health, choice), `connections` (HTTP to engines), `turns` (the line for
busy engines, the budget of retries), `guard` (quotas, bodies, overdue connections), `api` (what
changes in a request; configuration). Around them: `sources` (fleet files, DNS), `admin` and `keys`
(who may change the fleet, who may ask), `server` (sockets, TLS, restarts), `live` and `page` (what
people see of it).
"""
