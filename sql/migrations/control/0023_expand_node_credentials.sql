-- A node's row is an address: users and passwords are settings of each process.

-- Every role that reads nodes could read the passwords of all.
DO $$
DECLARE
    v_names constant text :=
        '(username|password|credential_provider|sentinel_username|sentinel_password|ssl_password)=[^&#]*';
    v_node record;
BEGIN
    FOR v_node IN
        UPDATE mqlayer.node AS n SET url = stripped.url
        FROM (SELECT node_id, regexp_replace(regexp_replace(regexp_replace(
                         regexp_replace(url, '^([^/]*//)[^/?#]*@', '\1'),
                         '&' || v_names, '', 'g'), '[?]' || v_names || '&', '?'), '[?]' || v_names, '') AS url
              FROM mqlayer.node) AS stripped
        WHERE stripped.node_id = n.node_id AND stripped.url <> n.url
        RETURNING n.name, n.url
    LOOP
        RAISE WARNING 'node %: user and password were taken out of its URL: set MQLAYER_REDIS_USER and '
            'MQLAYER_REDIS_PASSWORD_FILE for each process, and change the password, since backups have it', v_node.name;
    END LOOP;
END $$;

-- Audit rows hold addresses as they were shown; a password with an @ in it was shown in part.
UPDATE mqlayer.audit
SET facts = (SELECT jsonb_object_agg(key, CASE
                 WHEN key IN ('url', 'from', 'to') AND jsonb_typeof(value) = 'string'
                 THEN to_jsonb(regexp_replace(value #>> '{}', '^([a-z+]+://)[^/?#]*@', '\1')) ELSE value END)
             FROM jsonb_each(facts))
WHERE act IN ('node register', 'node set') AND facts <> '{}';

ALTER TABLE mqlayer.node ADD CONSTRAINT node_url_is_address CHECK (
    url !~ '^[^/]*//[^/?#]*@'
    AND url !~ '[?&](username|password|credential_provider|sentinel_username|sentinel_password|ssl_password)='
);
