-- name: audit_list
-- Acts of people, machines or both, the newest first, from before one on.
SELECT a.audit_id, a.at, a.actor, a.role, a.act, a.object, a.facts FROM mqlayer.audit a
WHERE (%(actor)s::text IS NULL OR left(a.actor, 200) = left(%(actor)s, 200) AND a.actor = %(actor)s)
  AND (%(act)s::text IS NULL OR a.act = %(act)s) AND (%(object)s::text IS NULL OR a.object = %(object)s)
  AND (%(since)s::timestamptz IS NULL OR a.at >= %(since)s) AND (%(until)s::timestamptz IS NULL OR a.at < %(until)s)
  AND (%(who)s::text IS NULL OR %(who)s = 'people' AND strpos(a.actor, '@') > 0 OR %(who)s = 'machines' AND NOT strpos(a.actor, '@') > 0)
  AND (%(before_at)s::timestamptz IS NULL OR (a.at, a.audit_id) < (%(before_at)s, %(before)s::bigint))
ORDER BY a.at DESC, a.audit_id DESC LIMIT %(limit)s;

-- name: audit_acts
-- The kinds of acts that were audited: one look into the index for each.
WITH RECURSIVE acts AS (
    (SELECT a.act FROM mqlayer.audit a ORDER BY a.act LIMIT 1)
    UNION ALL
    SELECT (SELECT a.act FROM mqlayer.audit a WHERE a.act > b.act ORDER BY a.act LIMIT 1) FROM acts b WHERE b.act IS NOT NULL
)
SELECT act FROM acts WHERE act IS NOT NULL LIMIT %(limit)s;
