-- A redrive whose filter can't be read ended the list of all groups' redrives. What is there stays.
ALTER TABLE mqlayer.redrive
    ADD CONSTRAINT redrive_filter_names CHECK (
        jsonb_typeof(filter) = 'object'
        AND filter - ARRAY['key', 'since', 'until']
                   - CASE WHEN kind = 'dead' THEN ARRAY['cause', 'error', 'dead_ids'] ELSE ARRAY['tag', 'snapshot'] END = '{}'
    ) NOT VALID,
    ADD CONSTRAINT redrive_filter_values CHECK (
        coalesce(jsonb_typeof(filter -> 'key'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'cause'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'error'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'tag'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'snapshot'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'since'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'until'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'dead_ids'), 'array') = 'array'
        AND octet_length(filter::text) <= 1000000
    ) NOT VALID,
    -- As ISO 8601 has it, and a time that is one: else the conversion refuses it.
    ADD CONSTRAINT redrive_filter_times CHECK (
        CASE WHEN NOT filter ? 'since' AND NOT filter ? 'until' THEN true
             WHEN coalesce(filter ->> 'since', filter ->> 'until')
                      ~ '^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d([.]\d{6})?([+-]\d\d:\d\d(:\d\d)?)$'
                  AND coalesce(filter ->> 'until', filter ->> 'since')
                      ~ '^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d([.]\d{6})?([+-]\d\d:\d\d(:\d\d)?)$'
             THEN (coalesce(filter ->> 'since', filter ->> 'until'))::timestamptz IS NOT NULL
                  AND (coalesce(filter ->> 'until', filter ->> 'since'))::timestamptz IS NOT NULL
             ELSE false END
    ) NOT VALID;
