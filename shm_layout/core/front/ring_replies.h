/* ring_replies.h - the replies of messages that came through rings. */
#ifndef PURGATORYD_FRONT_RING_REPLIES_H
#define PURGATORYD_FRONT_RING_REPLIES_H

#include "core/base/common.h"

/* Wake a client that sleeps as `how` says. */
void ring_client_wake(const struct pg_ring_server *s, uint32_t how, uint32_t *word, int socket);
/* Put the reply of the message that was applied, or keep it until its frames are on disk. False =
 * the caller has to send it: it is an error, or there is no space for it. */
bool ring_reply(struct pg_arena *a, struct pg_ring_server *s, struct pg_ring_client *c);
/* Put the leased jobs of members whose rings are awake, up to the first that the caller has to send;
 * then jobs_unsent stays true. */
void ring_jobs(struct pg_arena *a, struct pg_ring_server *s);
/* Forget a client in the pending replies, and in the list of answers. */
void ring_replies_forget(struct pg_ring_server *s, struct pg_ring_client *c);

#endif
