# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible router in front of prefill and decode engines.

Reading order: `flow` (the life of a request), `app` (routes, disconnects, the server, status and
metrics), `guard` (quotas, bodies, connections), `engines` (health, choice, HTTP to engines), `api`
(what changes in a request; configuration).
"""
