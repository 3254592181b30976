/* main.c - run a fuzz target on files, for example on its corpus, without libFuzzer. */

#include "fuzz.h"

static void run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        exit(1);
    }
    const size_t size = (size_t)ftell(file);
    uint8_t *data = malloc(size + (size == 0));
    rewind(file);
    if (data == NULL || fread(data, 1, size, file) != size) {
        perror(path);
        exit(1);
    }
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    fclose(file);
}

int main(int count, char **paths)
{
    for (int i = 1; i < count; i++)
        run_file(paths[i]);
    printf("%d inputs ok\n", count - 1);
    return 0;
}
