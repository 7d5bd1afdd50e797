// Code of the parent, in its own standard and with a warning that it lives with.
static_assert(__cplusplus == 201402L);
int Own() {
  int unused;
  return 1;
}
